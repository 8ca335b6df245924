"""Starting the ranks: flags, the plan made from them, the supervisor, and what one rank does."""
