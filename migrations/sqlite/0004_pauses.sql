-- What is paused: of these queues and kinds nothing is claimed. Every claim reads it.
create table jobq_pauses (
    -- 'queue' or 'kind'
    scope text not null check (scope in ('queue', 'kind')),
    name text not null,
    since integer not null default (now_us()),
    -- for people
    reason text,
    primary key (scope, name)
) strict, without rowid;

insert into jobq_migrations (version, name) values (4, 'pauses');
