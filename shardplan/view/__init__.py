"""How people look at a plan: text, HTML, and progress while it is made. Of planning it knows only the `Plan`."""
