BEGIN TRANSACTION;
CREATE TABLE catalog_checkpoints (
	checkpoint_id VARCHAR(64) NOT NULL, 
	training_run_id TEXT NOT NULL, 
	epoch BIGINT NOT NULL, 
	step BIGINT NOT NULL, 
	checkpoint_type VARCHAR(16) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	created_at BIGINT NOT NULL, 
	parent_id VARCHAR(64), 
	metrics TEXT NOT NULL, 
	storage_path TEXT NOT NULL, 
	verified_at BIGINT, 
	note TEXT NOT NULL, 
	deleted_at BIGINT, 
	files_pending BOOLEAN NOT NULL, 
	PRIMARY KEY (checkpoint_id)
);
INSERT INTO "catalog_checkpoints" VALUES('01m7nyt0xy0wvh8rb9yk3z00c2','old run',0,3,'full','complete',10364,1794959541182546,NULL,'{"loss": 1.116239990790685}','step-00000003-g1-4e6255.metadata.json',NULL,'',NULL,0);
INSERT INTO "catalog_checkpoints" VALUES('01m7nyt13bhpf1v5cfzwjq3bbn','old run',1,7,'full','complete',10364,1794959541355137,NULL,'{"loss": 1.0939068714777629}','step-00000007-g1-33bade.metadata.json',NULL,'',NULL,0);
INSERT INTO "catalog_checkpoints" VALUES('01m7nyt1amkaxaqpp3p1nn9a7a','old run',1,10,'full','complete',10364,1794959541588197,NULL,'{"loss": 1.0961435715357462}','step-00000010-g1-006605.metadata.json',NULL,'',NULL,0);
CREATE TABLE catalog_measurements (
	id INTEGER NOT NULL, 
	training_run_id TEXT NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	links INTEGER NOT NULL, 
	bytes BIGINT NOT NULL, 
	seconds FLOAT NOT NULL, 
	at BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE INDEX catalog_by_run ON catalog_checkpoints (training_run_id, state, step, created_at, checkpoint_id);
CREATE INDEX catalog_by_parent ON catalog_checkpoints (parent_id);
CREATE INDEX catalog_by_state ON catalog_checkpoints (state, files_pending);
CREATE INDEX catalog_measurements_by_run ON catalog_measurements (training_run_id, kind, id);
COMMIT;
