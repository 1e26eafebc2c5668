"""Commands of the command line, one file each: ``add(commands)`` declares it, ``run(arguments)`` does it."""
