"""What a run does, one folder or file per task, and the table of them: the only room that knows.

Knows nothing of training loops, searches, servers or pages: they call the task in hand.
"""
