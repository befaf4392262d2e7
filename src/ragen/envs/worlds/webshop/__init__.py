"""WebShop: the environment, its catalogue, the original files, and a generator of products."""
