// What was sent is followed to its settlement, with every change on the way.
import { assert, client, name } from '../support.mjs'

const sent = await client.agents.send('concierge', name(), { message: 'call add {"a": 1, "b": 2} then say Three' })
const changes = []
const result = await client.agents.wait(sent, { onEvent: (change) => void changes.push(change) })

const kinds = changes.map((change) => change.type)
assert.equal(result.text, 'Three')
assert.equal(kinds[0], 'message-appended')
assert.ok(kinds.indexOf('tool-input') < kinds.indexOf('tool-output'))
assert.equal(changes.filter((change) => change.type === 'message-delta').map((change) => change.delta).join(''), 'Three')
