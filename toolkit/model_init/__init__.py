"""Building a sharded model: a rank initializes or reads only what it keeps, one decoder layer at a time."""
