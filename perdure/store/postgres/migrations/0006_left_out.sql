-- Ranges of turns that prompts leave out (JSON), because an operator or the agent gave them up; NULL: none.
ALTER TABLE sessions ADD COLUMN left_out text;
