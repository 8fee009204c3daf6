-- By when a job has to be started; null = at any time, or it was started.
alter table jobq_jobs add column start_by integer;

create index jobq_jobs_expiring on jobq_jobs (start_by) where start_by is not null;

insert into jobq_migrations (version, name) values (6, 'expiry');
