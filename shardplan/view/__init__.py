"""How people look at a plan: text, HTML, and progress while it is made. Knows nothing but `Plan`."""
