"""The embedded demo: a tiny SD3.5-architecture model of scikit-learn's digits.

It exists so that every node and script can be tried on a CPU in seconds, with no
download. It is no picture generator: see digits.py for what it can be asked.
"""
