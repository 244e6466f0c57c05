DELETE FROM records WHERE session_id = :session_id AND turn < :until_turn AND format = 'perdure/fork/1'
