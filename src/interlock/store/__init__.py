"""The store: tables, migrations, the journal's single writer, repositories, and the processes alive on a home."""
