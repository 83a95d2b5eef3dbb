"""The command line: commands, what people see in a terminal, and the demo.

Every command is a few lines that call the library.
"""
