//go:build !gpu

package gpu

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// openPeer says that there are no GPUs in this build.
func openPeer(backend.Device) (peerDevice, error) {
	return nil, errors.New("this program was built without tag gpu")
}
