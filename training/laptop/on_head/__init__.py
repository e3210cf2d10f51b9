"""What a head answers: the laptop sends this code over ssh and asks (asking.py); `--here` calls it.

Standard library of Python 3.9 alone. A verb takes and gives what JSON has, and its annotation is the contract by which
the laptop checks an answer. OSError is the head's trouble, in words.
"""
