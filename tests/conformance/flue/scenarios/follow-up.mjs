// A second prompt goes to the same conversation, after the first one.
import { assert, client, name } from '../support.mjs'

const id = name()
const first = await client.agents.prompt('concierge', id, { message: 'say One' })
const second = await client.agents.prompt('concierge', id, { message: 'say Two' })

assert.equal(first.result.text, 'One')
assert.equal(second.result.text, 'Two')
assert.equal(first.streamUrl, second.streamUrl)
assert.ok(second.offset > first.offset)
