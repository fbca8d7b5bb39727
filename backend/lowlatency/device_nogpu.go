//go:build !gpu

package lowlatency

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// asPeer says that there are no GPUs in this build.
func asPeer(backend.Device) (Device, error) {
	return nil, errors.New("this program was built without tag gpu")
}
