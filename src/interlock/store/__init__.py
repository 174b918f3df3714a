"""The one SQL file: tables, migrations, the journal's single writer, and who is alive on this home."""
