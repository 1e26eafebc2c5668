"""Commands of the command line, one file each: ``run(arguments)`` does it; ``cli.options`` declares it."""
