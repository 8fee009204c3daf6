-- Which job may run of those with one key: one at a time. Who is to have the grant follows from the
-- jobs; a row whose job is gone is given to the next one, or deleted.
create table jobq.key_grants (
    job_key text collate "C" primary key,
    job_id bigint not null
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

-- on_block: what becomes of those behind it while it cannot run, 'block' or 'skip'
alter table jobq.jobs add column job_key text collate "C", add column on_block text;
alter table jobq.finished add column job_key text collate "C", add column on_block text;
alter table jobq.dead add column job_key text collate "C", add column on_block text;

-- The jobs of a key in order. Not by the id itself: to find the first one, a plan made while the table
-- was empty would then go through the primary key.
create index jobs_keyed on jobq.jobs (job_key, (id + 0)) where job_key is not null;

-- The band is the priority, or 32767 = next in line, or the priority + 100 = before its priority, or
-- -32768 = waits for its key.
alter table jobq.jobs drop constraint band_is_the_priority;
alter table jobq.jobs add constraint band_is_of_the_priority check (
    band in (priority, priority + 100, 32767)
    or (band = -32768 and run_after = 'infinity' and coalesce(wait_reason, '') = 'key')
) not valid;

insert into jobq.migrations (version, name) values (3, 'keys');
