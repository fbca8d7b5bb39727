package observe

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"strconv"

	"github.com/euryale-ml/euryale/backend"
)

// MetricsAddress returns where a rank of a machine serves its metrics if EURYALE_METRICS is
// address: on loopback if address has no host.
//
// Errors: ErrArgument for an address that is neither :PORT nor ADDRESS:PORT.
func MetricsAddress(address string, localRank int) (string, error) {
	host, text, err := net.SplitHostPort(address)
	port, wrong := strconv.Atoi(text)
	if err != nil || wrong != nil || port < 0 || port > 0 && port+localRank > math.MaxUint16 {
		return "", fmt.Errorf("%w: use :PORT or ADDRESS:PORT, with a port for each rank of the "+
			"machine from there", backend.ErrArgument)
	}
	if port > 0 {
		port += localRank
	}
	return net.JoinHostPort(cmp.Or(host, "127.0.0.1"), strconv.Itoa(port)), nil
}
