"""`python -m bench paging`: what paging changes, measured beside what can be worked out."""
