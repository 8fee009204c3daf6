-- What is paused: of these queues and kinds nothing is claimed. Every claim reads it.
create table jobq.pauses (
    -- 'queue' or 'kind'
    scope text not null,
    name text not null,
    since timestamptz not null default clock_timestamp(),
    -- for people
    reason text,
    primary key (scope, name),
    constraint pauses_scope_check check (scope in ('queue', 'kind'))
);

-- Jobs that wait for somebody to know their kind, and now also for their kind to be resumed.
drop index jobq.jobs_parked;
create index jobs_parked on jobq.jobs (queue, kind, id) where wait_reason in ('kind', 'paused');

insert into jobq.migrations (version, name) values (4, 'pauses');
