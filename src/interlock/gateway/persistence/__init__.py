"""Storage for what calls leave behind besides records: sessions, payloads, inputs, outcomes, means to undo them.

The unit that closes a call stores all of it. Only large payloads are encrypted and written in pieces before that, since
other writers would wait for them; the closing unit then takes the pieces over. It never depends on them: where they
cannot be used, it stores the payload whole.

All of it is encrypted at rest. Rows that an older version wrote in clear text are still read: a session is text instead
of bytes, a payload is as long as its row says, and an outcome is JSON.
"""
