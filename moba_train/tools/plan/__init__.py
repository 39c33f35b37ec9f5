"""`moba-train plan`: memory, time and layouts of a recipe before it runs."""
