"""A local web application on the lens: type a text, see what attention does, change it."""
