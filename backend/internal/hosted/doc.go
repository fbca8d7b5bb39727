// Package hosted is what communicators of host memory have in common that reach other machines:
// calls in order, one at a time, on the goroutine that started them or on that of their queue;
// memory; parts; and the life of the group. An [Engine] moves the data.
package hosted
