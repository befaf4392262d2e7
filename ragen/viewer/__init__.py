"""`ragen view`: what the agent thought and what the optimiser saw, in a browser, live."""
