"""`python -m bench gpu`: everything that only a GPU can tell, in one command for a machine that is lent for minutes.

plan.py         the steps, what each needs, and how the time is shared out. Pure
environment.py  what is installed and which GPU there is; packages brought along as wheels
running.py      one step as a process group with a time limit
report.py       what became of the steps: JSON, and a table last
command.py      the flags
"""
