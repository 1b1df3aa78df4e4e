SELECT pg_catalog.set_config('search_path', '', false);
CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.leases (
    lease_id character varying NOT NULL COLLATE pg_catalog."C",
    rollout_id character varying NOT NULL COLLATE pg_catalog."C",
    owner character varying NOT NULL COLLATE pg_catalog."C",
    leased_at double precision NOT NULL,
    leased_until double precision NOT NULL,
    released_at double precision
);
CREATE TABLE public.outcomes (
    seq bigint NOT NULL,
    rollout_id character varying NOT NULL COLLATE pg_catalog."C",
    outcome character varying NOT NULL COLLATE pg_catalog."C",
    error character varying COLLATE pg_catalog."C",
    finished_at double precision NOT NULL
);
CREATE SEQUENCE public.outcomes_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.outcomes_seq_seq OWNED BY public.outcomes.seq;
CREATE TABLE public.policy_versions (
    version bigint NOT NULL,
    step bigint,
    state character varying NOT NULL COLLATE pg_catalog."C",
    created_at double precision NOT NULL,
    detail json NOT NULL
);
CREATE TABLE public.removals (
    seq bigint NOT NULL,
    kind character varying NOT NULL COLLATE pg_catalog."C",
    created_at double precision NOT NULL,
    rule json NOT NULL,
    removed json NOT NULL
);
CREATE SEQUENCE public.removals_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.removals_seq_seq OWNED BY public.removals.seq;
CREATE TABLE public.rewards (
    seq bigint NOT NULL,
    reward_id character varying NOT NULL COLLATE pg_catalog."C",
    rollout_id character varying NOT NULL COLLATE pg_catalog."C",
    value double precision NOT NULL,
    name character varying NOT NULL COLLATE pg_catalog."C",
    turn bigint,
    source character varying NOT NULL COLLATE pg_catalog."C",
    created_at double precision NOT NULL,
    label character varying COLLATE pg_catalog."C",
    given_at double precision
);
CREATE SEQUENCE public.rewards_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.rewards_seq_seq OWNED BY public.rewards.seq;
CREATE TABLE public.rollout_keys (
    key_hash bytea NOT NULL,
    rollout_id character varying NOT NULL COLLATE pg_catalog."C",
    created_at double precision NOT NULL,
    revoked_at double precision,
    scope character varying DEFAULT 'calls'::character varying NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.rollout_tags (
    rollout_id character varying NOT NULL COLLATE pg_catalog."C",
    key character varying NOT NULL COLLATE pg_catalog."C",
    value character varying NOT NULL COLLATE pg_catalog."C",
    "position" bigint NOT NULL
);
CREATE TABLE public.rollouts (
    rollout_id character varying NOT NULL COLLATE pg_catalog."C",
    opened boolean NOT NULL,
    opened_at double precision NOT NULL,
    task_id character varying COLLATE pg_catalog."C",
    agent character varying COLLATE pg_catalog."C",
    task json,
    outcome character varying COLLATE pg_catalog."C",
    error character varying COLLATE pg_catalog."C",
    finished_at double precision,
    lease_id character varying COLLATE pg_catalog."C",
    lease_owner character varying COLLATE pg_catalog."C",
    leased_until double precision,
    consumed_at double precision,
    consumed_step bigint
);
CREATE TABLE public.spans (
    trace_id character varying NOT NULL COLLATE pg_catalog."C",
    span_id character varying NOT NULL COLLATE pg_catalog."C",
    parent_span_id character varying COLLATE pg_catalog."C",
    rollout_id character varying COLLATE pg_catalog."C",
    name character varying NOT NULL COLLATE pg_catalog."C",
    kind character varying NOT NULL COLLATE pg_catalog."C",
    start_ns bigint NOT NULL,
    end_ns bigint NOT NULL,
    status character varying NOT NULL COLLATE pg_catalog."C",
    attributes json NOT NULL
);
CREATE TABLE public.steps (
    step bigint NOT NULL,
    version bigint NOT NULL,
    created_at double precision NOT NULL,
    settings json NOT NULL,
    metrics json NOT NULL,
    checkpoint character varying COLLATE pg_catalog."C",
    batch json,
    run_id character varying COLLATE pg_catalog."C",
    manifest_digest character varying COLLATE pg_catalog."C",
    parent_digest character varying COLLATE pg_catalog."C"
);
CREATE TABLE public.task_anchors (
    task_id character varying NOT NULL COLLATE pg_catalog."C",
    state json NOT NULL,
    changed_at double precision NOT NULL
);
CREATE TABLE public.texts (
    digest bytea NOT NULL,
    blob bytea NOT NULL
);
CREATE TABLE public.turn_ledger (
    turn_id character varying NOT NULL COLLATE pg_catalog."C",
    step bigint,
    skip_reason character varying COLLATE pg_catalog."C",
    created_at double precision NOT NULL,
    CONSTRAINT ck_turn_ledger_trained_or_skipped CHECK (((step IS NULL) <> (skip_reason IS NULL)))
);
CREATE TABLE public.turn_texts (
    turn_id character varying NOT NULL COLLATE pg_catalog."C",
    "position" bigint NOT NULL,
    path json NOT NULL,
    digest bytea NOT NULL
);
CREATE TABLE public.turns (
    seq bigint NOT NULL,
    turn_id character varying NOT NULL COLLATE pg_catalog."C",
    rollout_id character varying NOT NULL COLLATE pg_catalog."C",
    parent_id character varying COLLATE pg_catalog."C",
    fork_reason character varying COLLATE pg_catalog."C",
    dialect character varying NOT NULL COLLATE pg_catalog."C",
    model character varying NOT NULL COLLATE pg_catalog."C",
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    context_digest bytea NOT NULL,
    delta bytea NOT NULL,
    completion bytea NOT NULL,
    logprobs bytea NOT NULL,
    policy_versions json NOT NULL,
    last_version bigint,
    sampling json NOT NULL,
    finish_reason character varying COLLATE pg_catalog."C",
    untrainable character varying COLLATE pg_catalog."C",
    parent_span_id character varying COLLATE pg_catalog."C",
    request bytea,
    response bytea,
    created_at double precision NOT NULL,
    request_base character varying COLLATE pg_catalog."C",
    request_marks bytea,
    routed_experts bytea,
    state_key character varying COLLATE pg_catalog."C",
    observation character varying COLLATE pg_catalog."C"
);
CREATE SEQUENCE public.turns_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.turns_seq_seq OWNED BY public.turns.seq;
CREATE TABLE public.version_events (
    seq bigint NOT NULL,
    version bigint NOT NULL,
    step bigint,
    state character varying NOT NULL COLLATE pg_catalog."C",
    created_at double precision NOT NULL,
    detail json NOT NULL
);
CREATE SEQUENCE public.version_events_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.version_events_seq_seq OWNED BY public.version_events.seq;
ALTER TABLE ONLY public.outcomes ALTER COLUMN seq SET DEFAULT nextval('public.outcomes_seq_seq'::regclass);
ALTER TABLE ONLY public.removals ALTER COLUMN seq SET DEFAULT nextval('public.removals_seq_seq'::regclass);
ALTER TABLE ONLY public.rewards ALTER COLUMN seq SET DEFAULT nextval('public.rewards_seq_seq'::regclass);
ALTER TABLE ONLY public.turns ALTER COLUMN seq SET DEFAULT nextval('public.turns_seq_seq'::regclass);
ALTER TABLE ONLY public.version_events ALTER COLUMN seq SET DEFAULT nextval('public.version_events_seq_seq'::regclass);
INSERT INTO public.alembic_version VALUES ('0009');
INSERT INTO public.leases VALUES ('01a203b797b93364c00008fd40305bc1', 'a', 'trainer', 1795358693.306249, 1795358693.3072488, NULL);
INSERT INTO public.leases VALUES ('01a203b797b93364c00008fd40305bc1', 'b', 'trainer', 1795358693.306249, 1795358693.3072488, NULL);
INSERT INTO public.leases VALUES ('01a203b79801735e30000afd40305bc1', 'a', 'trainer', 1795358693.380495, 1795359693.380495, 1795358693.405775);
INSERT INTO public.leases VALUES ('01a203b79801735e30000afd40305bc1', 'b', 'trainer', 1795358693.380495, 1795359693.380495, 1795358693.405775);
INSERT INTO public.leases VALUES ('01a203b79801735e30000afd40305bc1', 'trained', 'trainer', 1795358693.380495, 1795359693.380495, 1795358693.428811);
INSERT INTO public.leases VALUES ('01a203b79801735e30000afd40305bc1', 't2', 'trainer', 1795358693.380495, 1795359693.380495, 1795358693.428811);
INSERT INTO public.outcomes VALUES (1, 'a', 'completed', NULL, 1004);
INSERT INTO public.outcomes VALUES (2, 'b', 'completed', NULL, 1004);
INSERT INTO public.outcomes VALUES (3, 'trained', 'completed', NULL, 2001);
INSERT INTO public.outcomes VALUES (4, 'crashed', 'env_error', NULL, 2101);
INSERT INTO public.outcomes VALUES (5, 't2', 'completed', NULL, 2002);
INSERT INTO public.outcomes VALUES (6, 'e', 'completed', NULL, 4003);
INSERT INTO public.policy_versions VALUES (0, NULL, 'serving', 900, '{"model":"é"}');
INSERT INTO public.policy_versions VALUES (1, 1, 'failed', 3001, '{}');
INSERT INTO public.removals VALUES (1, 'mends', 5000, '{"names":["x"]}', '{"retold":1}');
INSERT INTO public.rewards VALUES (1, 'wa', 'a', 1, 'reward', NULL, 'judge', 1003, 'grader', NULL);
INSERT INTO public.rewards VALUES (2, 'wb', 'b', 0.25, 'reward', NULL, 'judge', 1003, 'grader', NULL);
INSERT INTO public.rewards VALUES (3, '01a203b7979506ef600007fd40305bc1', 'trained', 1, 'reward', NULL, 'direct', 2000, NULL, NULL);
INSERT INTO public.rewards VALUES (4, '01a203b797f6bf30a00009fd40305bc1', 't2', 1, 'reward', NULL, 'direct', 2001, NULL, NULL);
INSERT INTO public.rewards VALUES (5, 'we', 'e', 1, 'reward', NULL, 'direct', 4002, NULL, NULL);
INSERT INTO public.rollout_keys VALUES ('\x6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b', 'a', 1795358693.3041432, NULL, 'calls');
INSERT INTO public.rollout_tags VALUES ('a', 'split', 'train', 0);
INSERT INTO public.rollout_tags VALUES ('a', 'é', 'ö', 1);
INSERT INTO public.rollout_tags VALUES ('b', 'split', 'train', 0);
INSERT INTO public.rollout_tags VALUES ('b', 'é', 'ö', 1);
INSERT INTO public.rollout_tags VALUES ('trained', 'split', 'train', 0);
INSERT INTO public.rollout_tags VALUES ('01a203b7986042aaa0000bfd40305bc1', 'anchor_task', 'climb', 0);
INSERT INTO public.rollout_tags VALUES ('01a203b7986042aaa0000bfd40305bc1', 'anchor', '1', 1);
INSERT INTO public.rollouts VALUES ('unscored', true, 2200, 'old', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rollouts VALUES ('crashed', true, 2100, 'old', NULL, NULL, 'env_error', NULL, 2101, NULL, NULL, NULL, 1795358693.306249, NULL);
INSERT INTO public.rollouts VALUES ('a', true, 999, 'task', 'coder', '{"goal":[1,null]}', 'completed', NULL, 1004, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rollouts VALUES ('b', true, 999, 'task', 'coder', '{"goal":[1,null]}', 'completed', NULL, 1004, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rollouts VALUES ('trained', true, 2000, 'old', NULL, NULL, 'completed', NULL, 2001, '01a203b79801735e30000afd40305bc1', 'trainer', NULL, 1795358693.428811, 1);
INSERT INTO public.rollouts VALUES ('t2', true, 2001, 'old', NULL, NULL, 'completed', NULL, 2002, '01a203b79801735e30000afd40305bc1', 'trainer', NULL, 1795358693.428811, 1);
INSERT INTO public.rollouts VALUES ('e', true, 4000, 'climb', NULL, NULL, 'completed', NULL, 4003, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rollouts VALUES ('01a203b7986042aaa0000bfd40305bc1', true, 1795358693.4932916, 'climb@1', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.spans VALUES ('tr', 'sp', NULL, 'a', 'chat', 'internal', 1, 2, 'ok', '{"k":["v"]}');
INSERT INTO public.spans VALUES ('other', 'sp', NULL, NULL, 'n', 'internal', 1, 2, 'ok', '{}');
INSERT INTO public.steps VALUES (1, 1, 3000, '{"lr":0.00001}', '{"loss":0.5}', 'state/step-1', '{"order":["trained"]}', 'run', 'ab', NULL);
INSERT INTO public.task_anchors VALUES ('climb', '{"expert":"e","anchors":{"turns":2,"at":1,"rounds":1,"results":{}},"queue":[1],"coming":[["01a203b7986042aaa0000bfd40305bc1","e",1,1795358693.4722805,true]],"counted":0,"best":null}', 1795358693.4723132);
INSERT INTO public.texts VALUES ('\xad04973cf93751d01bd3725476582d8f', '\x50608905150400e2871718a0b539e0a7fd9da47ccb9d954a8b05fc54551bb73454710d81c250038dd4a097e6f396e0b04f444889fc724ac67a79916c294b9a44b25fab4148cabd43b9e6d0cf26ea39d0596a94b5c8db298755b85e02dee07a3bef95c4a8b43600020a00bf9b5098a51de808e71011eef6933700f50b560627e692851bcd8c5057882b');
INSERT INTO public.turn_ledger VALUES ('crashed.0', NULL, 'env_error', 1795358693.306249);
INSERT INTO public.turn_ledger VALUES ('crashed.1', NULL, 'env_error', 1795358693.306249);
INSERT INTO public.turn_ledger VALUES ('trained.0', 1, NULL, 1795358693.428811);
INSERT INTO public.turn_ledger VALUES ('trained.1', 1, NULL, 1795358693.428811);
INSERT INTO public.turn_ledger VALUES ('t2.0', 1, NULL, 1795358693.428811);
INSERT INTO public.turn_ledger VALUES ('t2.1', NULL, 'duplicate', 1795358693.428811);
INSERT INTO public.turn_texts VALUES ('b.0', 0, '["request","messages"]', '\xad04973cf93751d01bd3725476582d8f');
INSERT INTO public.turns VALUES (1, 'a.0', 'a', NULL, NULL, 'chat', 'm', 3, 2, '\x26d8827a48fe7ec0aa95c70ee3585b4f', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, '\x5060a20565040022c81717a0b5396fd3fe9652fee6f622d76201a9aa364221fd173509202926f2864dfeb0ae620b607a35916141b73da5a77fec90aead535621fdeb3381a47563b16e83f9552bf229d0396cd679d03d64985ed9d648a200bd77d6cbd493d957b4a8410d00bf9b5098a51de808e71011ee56943700f50b560627e6aa851bd38cb02512ac8a766b088d4a0ac106', '\x502095bd0000507b226f6b20227d7d5d7d0300a49b480d51c28f435c01', 1000, NULL, '\x5b5b226d65737361676573222c226c697374222c325d5d0a12663422fc6c3f2b58243afa981f124cb7873971a458941c24a8dbbc0271998ba1e466cd86c60c6d', NULL, 's0', 'seen');
INSERT INTO public.turns VALUES (2, 'a.1', 'a', 'a.0', NULL, 'chat', 'm', 8, 2, '\x4e32b6cf846baec9b8cce2ac538bcbda', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{"temperature":0.7}', NULL, NULL, NULL, '\x5020eb9d0100e05b7b73223a5b322c5b226f6b20676f206f6e20227d5d5d7d2c5b5d5d0700a544f552dc807413d1101ffc13c55e08ba712936', '\x50203fad0000587b22646f6e65227d7d5d7d02006a88127e1ce20a', 1001, 'a.0', '\x5b5b226d65737361676573222c226c697374222c345d5d0a12663422fc6c3f2b6cda082e9044b668d5782fe70eb4470558243afa981f124c24a8dbbc0271998ba1e466cd86c60c6d', NULL, NULL, NULL);
INSERT INTO public.turns VALUES (3, 'a.2', 'a', NULL, 'history_rewritten', 'chat', 'm', 2, 2, '\xdb234339b985cf70d7752a467ff46b9d', '\x0120021100000109', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, NULL, NULL, 1002, NULL, NULL, '\x052080950200a404934e554d5059010076007b276465736372273a20277c7531272c2027666f727472616e5f6f72646572273a2046616c73652c20277368617065273a2028332c20322c2032292c207d200a0100c94e1005200c610000060502000106040200000507', NULL, NULL);
INSERT INTO public.turns VALUES (4, 'b.0', 'b', NULL, NULL, 'chat', 'm', 3, 2, '\x26d8827a48fe7ec0aa95c70ee3585b4f', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, '\x50201dad0000587b6d2273223a6e756c6c7d020035444125856003', '\x502095bd0000507b226f6b20227d7d5d7d0300a49b480d51c28f435c01', 1000, NULL, '\x5b5b226d65737361676573222c226c697374222c325d5d0a12663422fc6c3f2b58243afa981f124cb7873971a458941c24a8dbbc0271998ba1e466cd86c60c6d', NULL, 's0', 'seen');
INSERT INTO public.turns VALUES (5, 'b.1', 'b', 'b.0', NULL, 'chat', 'm', 8, 2, '\x4e32b6cf846baec9b8cce2ac538bcbda', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{"temperature":0.7}', NULL, NULL, NULL, '\x5020eb9d0100e05b7b73223a5b322c5b226f6b20676f206f6e20227d5d5d7d2c5b5d5d0700a544f552dc807413d1101ffc13c55e08ba712936', '\x50203fad0000587b22646f6e65227d7d5d7d02006a88127e1ce20a', 1001, 'b.0', '\x5b5b226d65737361676573222c226c697374222c345d5d0a12663422fc6c3f2b6cda082e9044b668d5782fe70eb4470558243afa981f124c24a8dbbc0271998ba1e466cd86c60c6d', NULL, NULL, NULL);
INSERT INTO public.turns VALUES (6, 'b.2', 'b', NULL, 'history_rewritten', 'chat', 'm', 2, 2, '\xdb234339b985cf70d7752a467ff46b9d', '\x0120021100000109', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, NULL, NULL, 1002, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.turns VALUES (7, 'trained.0', 'trained', NULL, NULL, 'chat', 'm', 3, 2, '\x26d8827a48fe7ec0aa95c70ee3585b4f', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, NULL, NULL, 2000, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.turns VALUES (8, 'trained.1', 'trained', 'trained.0', NULL, 'chat', 'm', 8, 2, '\x4e32b6cf846baec9b8cce2ac538bcbda', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, NULL, NULL, 2000, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.turns VALUES (9, 'crashed.0', 'crashed', NULL, NULL, 'chat', 'm', 3, 2, '\x26d8827a48fe7ec0aa95c70ee3585b4f', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, NULL, NULL, 2100, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.turns VALUES (10, 'crashed.1', 'crashed', 'crashed.0', NULL, 'chat', 'm', 8, 2, '\x4e32b6cf846baec9b8cce2ac538bcbda', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, NULL, NULL, 2100, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.turns VALUES (11, 'unscored.0', 'unscored', NULL, NULL, 'chat', 'm', 3, 2, '\x26d8827a48fe7ec0aa95c70ee3585b4f', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, NULL, NULL, 2200, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.turns VALUES (12, 'unscored.1', 'unscored', 'unscored.0', NULL, 'chat', 'm', 8, 2, '\x4e32b6cf846baec9b8cce2ac538bcbda', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, 'unacknowledged', NULL, NULL, NULL, 2200, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.turns VALUES (13, 't2.0', 't2', NULL, NULL, 'chat', 'm', 3, 2, '\x26d8827a48fe7ec0aa95c70ee3585b4f', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, NULL, NULL, 2001, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.turns VALUES (14, 't2.1', 't2', 't2.0', NULL, 'chat', 'm', 8, 2, '\x4e32b6cf846baec9b8cce2ac538bcbda', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, NULL, NULL, 2001, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.turns VALUES (15, 'e.0', 'e', NULL, NULL, 'chat', 'm', 3, 2, '\x26d8827a48fe7ec0aa95c70ee3585b4f', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, '\x50202ecd0000687b73223a5b2261736b227d5d7d0310099c11b05728057105', '\x50200c6100007b2273616964223a2278227d', 4000, NULL, '\x5b5d0abb24561edb4015ea', NULL, NULL, NULL);
INSERT INTO public.turns VALUES (16, 'e.1', 'e', 'e.0', NULL, 'chat', 'm', 8, 2, '\x4e32b6cf846baec9b8cce2ac538bcbda', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{}', NULL, NULL, NULL, '\x50202fd50000707b73223a5b226d6f7265227d5d7d0310099c11b05728057105', '\x50200c6100007b2273616964223a2279227d', 4001, NULL, '\x5b5d0af0b1b49cc81ed2b1', NULL, NULL, NULL);
INSERT INTO public.turns VALUES (17, '01a203b79875350380000cfd40305bc1', '01a203b7986042aaa0000bfd40305bc1', NULL, NULL, 'chat', 'm', 3, 2, '\x26d8827a48fe7ec0aa95c70ee3585b4f', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{"source":"expert","reward":1.0,"distance":1}', NULL, NULL, NULL, '\x50202ecd0000687b73223a5b2261736b227d5d7d0310099c11b05728057105', '\x50200c6100007b2273616964223a2278227d', 1795358693.4932353, NULL, '\x5b5d0abb24561edb4015ea', NULL, NULL, NULL);
INSERT INTO public.turns VALUES (18, '01a203b79875375890000dfd40305bc1', '01a203b7986042aaa0000bfd40305bc1', '01a203b79875350380000cfd40305bc1', NULL, 'chat', 'm', 8, 2, '\x4e32b6cf846baec9b8cce2ac538bcbda', '\x012003190000010203', '\x0120021100000405', '\x0420063100000000000000002002110000bfbf', '[[0,2]]', 0, '{"source":"expert","reward":1.0,"distance":0,"taken":false}', NULL, NULL, NULL, NULL, NULL, 1795358693.493261, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.version_events VALUES (1, 0, NULL, 'serving', 900, '{"model":"é"}');
INSERT INTO public.version_events VALUES (2, 1, 1, 'failed', 3001, '{}');
SELECT pg_catalog.setval('public.outcomes_seq_seq', 6, true);
SELECT pg_catalog.setval('public.removals_seq_seq', 1, true);
SELECT pg_catalog.setval('public.rewards_seq_seq', 5, true);
SELECT pg_catalog.setval('public.turns_seq_seq', 18, true);
SELECT pg_catalog.setval('public.version_events_seq_seq', 2, true);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.leases
    ADD CONSTRAINT pk_leases PRIMARY KEY (lease_id, rollout_id);
ALTER TABLE ONLY public.outcomes
    ADD CONSTRAINT pk_outcomes PRIMARY KEY (seq);
ALTER TABLE ONLY public.policy_versions
    ADD CONSTRAINT pk_policy_versions PRIMARY KEY (version);
ALTER TABLE ONLY public.removals
    ADD CONSTRAINT pk_removals PRIMARY KEY (seq);
ALTER TABLE ONLY public.rewards
    ADD CONSTRAINT pk_rewards PRIMARY KEY (seq);
ALTER TABLE ONLY public.rollout_keys
    ADD CONSTRAINT pk_rollout_keys PRIMARY KEY (key_hash);
ALTER TABLE ONLY public.rollout_tags
    ADD CONSTRAINT pk_rollout_tags PRIMARY KEY (rollout_id, key);
ALTER TABLE ONLY public.rollouts
    ADD CONSTRAINT pk_rollouts PRIMARY KEY (rollout_id);
ALTER TABLE ONLY public.spans
    ADD CONSTRAINT pk_spans PRIMARY KEY (trace_id, span_id);
ALTER TABLE ONLY public.steps
    ADD CONSTRAINT pk_steps PRIMARY KEY (step);
ALTER TABLE ONLY public.task_anchors
    ADD CONSTRAINT pk_task_anchors PRIMARY KEY (task_id);
ALTER TABLE ONLY public.texts
    ADD CONSTRAINT pk_texts PRIMARY KEY (digest);
ALTER TABLE ONLY public.turn_ledger
    ADD CONSTRAINT pk_turn_ledger PRIMARY KEY (turn_id);
ALTER TABLE ONLY public.turn_texts
    ADD CONSTRAINT pk_turn_texts PRIMARY KEY (turn_id, "position");
ALTER TABLE ONLY public.turns
    ADD CONSTRAINT pk_turns PRIMARY KEY (seq);
ALTER TABLE ONLY public.version_events
    ADD CONSTRAINT pk_version_events PRIMARY KEY (seq);
ALTER TABLE ONLY public.outcomes
    ADD CONSTRAINT uq_outcomes_rollout_id_finished_at_outcome UNIQUE (rollout_id, finished_at, outcome);
ALTER TABLE ONLY public.rewards
    ADD CONSTRAINT uq_rewards_reward_id UNIQUE (reward_id);
ALTER TABLE ONLY public.turns
    ADD CONSTRAINT uq_turns_turn_id UNIQUE (turn_id);
CREATE INDEX ix_leases_rollout_id ON public.leases USING btree (rollout_id);
CREATE INDEX ix_rewards_rollout_id ON public.rewards USING btree (rollout_id);
CREATE INDEX ix_rollout_keys_rollout_id ON public.rollout_keys USING btree (rollout_id);
CREATE INDEX ix_rollout_tags_key_value_rollout_id ON public.rollout_tags USING btree (key, value, rollout_id);
CREATE INDEX ix_rollouts_consumed_at_finished_at ON public.rollouts USING btree (consumed_at, finished_at);
CREATE INDEX ix_rollouts_opened_at ON public.rollouts USING btree (opened_at);
CREATE INDEX ix_rollouts_task_id ON public.rollouts USING btree (task_id);
CREATE INDEX ix_spans_rollout_id ON public.spans USING btree (rollout_id);
CREATE INDEX ix_turn_ledger_step ON public.turn_ledger USING btree (step);
CREATE INDEX ix_turn_texts_digest ON public.turn_texts USING btree (digest);
CREATE INDEX ix_turns_parent_id ON public.turns USING btree (parent_id);
CREATE INDEX ix_turns_request_base ON public.turns USING btree (request_base);
CREATE INDEX ix_turns_rollout_id_seq ON public.turns USING btree (rollout_id, seq);
CREATE INDEX ix_version_events_version ON public.version_events USING btree (version);
ALTER TABLE ONLY public.leases
    ADD CONSTRAINT fk_leases_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES public.rollouts(rollout_id);
ALTER TABLE ONLY public.outcomes
    ADD CONSTRAINT fk_outcomes_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES public.rollouts(rollout_id);
ALTER TABLE ONLY public.rewards
    ADD CONSTRAINT fk_rewards_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES public.rollouts(rollout_id);
ALTER TABLE ONLY public.rollout_tags
    ADD CONSTRAINT fk_rollout_tags_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES public.rollouts(rollout_id);
ALTER TABLE ONLY public.rollouts
    ADD CONSTRAINT fk_rollouts_consumed_step_steps FOREIGN KEY (consumed_step) REFERENCES public.steps(step);
ALTER TABLE ONLY public.spans
    ADD CONSTRAINT fk_spans_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES public.rollouts(rollout_id);
ALTER TABLE ONLY public.turn_ledger
    ADD CONSTRAINT fk_turn_ledger_step_steps FOREIGN KEY (step) REFERENCES public.steps(step);
ALTER TABLE ONLY public.turn_ledger
    ADD CONSTRAINT fk_turn_ledger_turn_id_turns FOREIGN KEY (turn_id) REFERENCES public.turns(turn_id);
ALTER TABLE ONLY public.turn_texts
    ADD CONSTRAINT fk_turn_texts_digest_texts FOREIGN KEY (digest) REFERENCES public.texts(digest);
ALTER TABLE ONLY public.turn_texts
    ADD CONSTRAINT fk_turn_texts_turn_id_turns FOREIGN KEY (turn_id) REFERENCES public.turns(turn_id);
ALTER TABLE ONLY public.turns
    ADD CONSTRAINT fk_turns_parent_id_turns FOREIGN KEY (parent_id) REFERENCES public.turns(turn_id);
ALTER TABLE ONLY public.turns
    ADD CONSTRAINT fk_turns_request_base_turns FOREIGN KEY (request_base) REFERENCES public.turns(turn_id);
ALTER TABLE ONLY public.turns
    ADD CONSTRAINT fk_turns_rollout_id_rollouts FOREIGN KEY (rollout_id) REFERENCES public.rollouts(rollout_id);
