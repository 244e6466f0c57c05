// A prompt that waits gets the text, the usage and the model.
import { assert, client, name } from '../support.mjs'

const answer = await client.agents.prompt('concierge', name(), { message: 'say Hello there' })

assert.equal(answer.result.text, 'Hello there')
assert.ok(answer.result.usage.totalTokens > 0)
assert.deepEqual(answer.result.model, { provider: 'openai-chat', id: 'scripted' })
assert.ok(answer.submissionId.startsWith('dlv_'))
