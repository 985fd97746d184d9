"""Commands for those who work on this pack; nothing here is needed to use it."""
