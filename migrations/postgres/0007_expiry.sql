-- By when a job has to be started; null = at any time, or it was started.
alter table jobq.jobs add column start_by timestamptz;

create index jobs_expiring on jobq.jobs (start_by) where start_by is not null;

insert into jobq.migrations (version, name) values (7, 'expiry');
