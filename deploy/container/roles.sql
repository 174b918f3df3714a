-- The roles and the database of a store with two roles, as docs/how-to/postgres.md says. The image of PostgreSQL runs this
-- as a superuser when it makes its cluster; on a server of your own, run it with psql.
--
-- interlock_owner owns the tables: it migrates them, and it removes records past their term. interlock is the role of
-- servers: Interlock grants it what they need when it makes the tables. It can add records to the journal and read them,
-- and can neither change nor remove one.
\set owner_password `cat "${OWNER_PASSWORD_FILE:-owner.password}"`
\set server_password `cat "${SERVER_PASSWORD_FILE:-server.password}"`
CREATE ROLE interlock_owner LOGIN PASSWORD :'owner_password';
CREATE ROLE interlock LOGIN PASSWORD :'server_password';
CREATE DATABASE interlock OWNER interlock_owner;
REVOKE ALL ON DATABASE interlock FROM PUBLIC;
GRANT CONNECT ON DATABASE interlock TO interlock;
