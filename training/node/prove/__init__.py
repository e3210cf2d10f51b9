"""`fab prove`: does all of it work on these machines, and how fast are they?

`walk` runs on every rank in one start, made of `devices` and `curve`; `agree` runs on the head; `conduct` and
`drills` are the control side. A row of the table is an `outcome`.
"""
