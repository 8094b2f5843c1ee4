"""The commands of `layertap` that need no scheduler, one subject a file."""
