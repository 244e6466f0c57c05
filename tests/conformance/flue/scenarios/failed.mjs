// A prompt that fails says so, and which one it was.
import { assert, client, name } from '../support.mjs'

const failing = client.agents.prompt('concierge', name(), { message: 'fail 400' })

await assert.rejects(failing, (error) => {
  assert.equal(error.name, 'FlueApiError')
  assert.equal(error.status, 500)
  assert.equal(error.body.error.type, 'internal_error')
  assert.ok(error.body.error.meta.submissionId.startsWith('dlv_'))
  return true
})
