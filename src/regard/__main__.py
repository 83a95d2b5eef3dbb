"""`python -m regard`, as `regard`."""

from regard.cli import main

main()
