"""The vocabulary of a call: phases, results, authority, context, cost, and the prepared tool that it runs."""
