"""The emoji world: pictures of a color font, named by Unicode."""
