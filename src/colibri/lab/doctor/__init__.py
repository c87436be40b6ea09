"""`coli doctor`: what this machine and this model are fit for, and what would mend the rest."""
