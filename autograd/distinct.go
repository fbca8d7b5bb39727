package autograd

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// agreeOnParams is agree, and then returns the same error on all ranks if some of them are
// goroutines of one process and have a parameter in the same memory: they would write over each
// other's values and gradients. Goroutines exchange addresses, processes nothing more than in
// agree.
func agreeOnParams(comm backend.Communicator, description string, params []*param,
	wrong error) error {
	process := sha256.Sum256([]byte(rendezvous.ThisProcess()))
	processes, err := agreeAndGather(comm, description, process[:8], wrong)
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, p := range processes {
		count[string(p)]++
	}
	if len(count) == len(processes) {
		return nil
	}
	var note []byte
	for _, p := range params {
		value, err := p.value()
		if err != nil { // examine has seen it
			return err
		}
		note = binary.LittleEndian.AppendUint64(note, uint64(value.Addr()))
	}
	notes, err := gather(comm, note)
	if err != nil {
		return err
	}
	owners := map[string]int{} // by process and address
	for r, note := range notes {
		for i := range params {
			key := string(processes[r]) + string(note[8*i:8*i+8])
			if owner, taken := owners[key]; taken && owner != r {
				return fmt.Errorf("%w: ranks %d and %d, which are goroutines of one process, "+
					"share the tensor of parameter %d, %s: build a graph and tensors for each rank",
					backend.ErrArgument, owner, r, i, params[i].name)
			}
			owners[key] = r
		}
	}
	return nil
}
