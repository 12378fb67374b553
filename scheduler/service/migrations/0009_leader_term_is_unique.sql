-- A change of `term` now locks the leader row `for update` and waits for the transactions that locked it `for key share`;
-- a renewal changes only `expires_at` and waits for none.
create unique index leader_term on leader (term);
