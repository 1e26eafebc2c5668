"""Commands of the command line, one file each: ``run(arguments)`` does it; options.toml declares it."""
