"""What plugins that hand KV over build with: gates that bring KV, and engines that move it."""

from pegboard.plugins.kv_handoff.api.gate import HandoffGate as HandoffGate
from pegboard.plugins.kv_handoff.api.gate import KVReservation as KVReservation
from pegboard.plugins.kv_handoff.api.gate import KVVerdict as KVVerdict
from pegboard.plugins.kv_handoff.api.transfer import KVTransfer as KVTransfer
from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext as KVTransferContext
from pegboard.plugins.kv_handoff.arrived import Arrived as Arrived
