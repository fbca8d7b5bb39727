package cuda

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// disown forgets memory in use: it is the caller's, who gives it to the driver.
func (c *cache) disown(addr uintptr) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.search(addr)
	if i < 0 || c.spans[i].addr != addr || !c.spans[i].used {
		return fmt.Errorf("%w: disown of %#x, which was not allocated here or was freed before", backend.ErrArgument, addr)
	}
	c.stats.InUse -= c.spans[i].nbytes
	c.forget(i)
	return nil
}
