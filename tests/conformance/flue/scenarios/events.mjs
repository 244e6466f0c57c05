// The stream of a receipt is read with the client of Durable Streams, in each of its three modes.
import { stream } from '@durable-streams/client'
import { assert, client, name } from '../support.mjs'

const answer = await client.agents.prompt('concierge', name(), { message: 'think Let me see; say Hello there' })

const read = async (live) => {
  const response = await stream({ url: answer.streamUrl, offset: answer.offset, live, json: true, warnOnHttp: false })
  const events = []
  return new Promise((resolve, reject) => {
    response.closed.catch(reject)
    response.subscribeJson((batch) => {
      events.push(...batch.items)
      if (events.some((event) => event.type === 'submission_settled')) {
        response.cancel()
        resolve(events)
      }
    })
  })
}

const caughtUp = await read(false)
const polled = await read('long-poll')
const pushed = await read('sse')
const kinds = caughtUp.map((event) => event.type)

assert.deepEqual(polled, caughtUp)
assert.deepEqual(pushed, caughtUp)
assert.ok(caughtUp.every((event) => event.v === 3))
assert.ok(kinds.indexOf('operation_start') < kinds.indexOf('turn_start'))
assert.ok(kinds.indexOf('thinking_delta') < kinds.indexOf('thinking_end'))
assert.ok(kinds.indexOf('text_delta') < kinds.lastIndexOf('message_end'))
assert.equal(caughtUp.filter((event) => event.type === 'text_delta').map((event) => event.text).join(''), 'Hello there')
