"""Several processes on one study: who is alive, who goes first, what is taken, what dead ones left behind."""
