"""Models: their shape, read from a config.json; what is known about their family; which layouts they support."""
