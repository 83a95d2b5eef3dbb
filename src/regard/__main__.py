"""`python -m regard`, as `regard`."""

from regard.cli.commands import main

main()
