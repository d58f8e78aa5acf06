"""Dead letters at run time: looking at them, sending them again, telling about them."""
