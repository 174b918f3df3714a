"""The composition root: opens a home, chooses the parts, and offers them as one object.

Interlock     everything together, and what a program does with it
Opening       how a home is opened
backends      which parts the settings choose
Chores        what is looked after in the background
scratch       where tools are tried out before they are admitted
demonstration where the tools of the tour keep what they do
"""

from interlock.app.interlock import Admission, Interlock

__all__ = ["Admission", "Interlock"]
