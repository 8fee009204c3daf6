-- Which version the rules have that claims go by: what is paused, and which queues are limited. Whoever
-- claims remembers them, and reads them again once this has changed.
create table jobq.rules (
    only_row boolean primary key default true check (only_row),
    version bigint not null
) with (
    fillfactor = 10
);

insert into jobq.rules (version) values (1);

-- For whoever changes them, by hand too.
create function jobq.raise_rules() returns trigger language plpgsql as $$
begin
    update jobq.rules set version = version + 1;
    return null;
end
$$;

create trigger pauses_are_rules
    after insert or update or delete or truncate on jobq.pauses
    for each statement execute function jobq.raise_rules();

create trigger limits_are_rules
    after insert or delete or truncate on jobq.queue_limits
    for each statement execute function jobq.raise_rules();

-- Raised by every claim that takes of a limit: so that one sees what another took meanwhile.
alter table jobq.queue_limits add column turn bigint not null default 0;

insert into jobq.migrations (version, name) values (6, 'rules');
