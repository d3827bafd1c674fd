# Notes the SHA-256 of LIBRARY beside it, as a whole or not at all. Run after each link: kvlathe compares it before it loads.
get_filename_component(NAME "${LIBRARY}" NAME)
file(SHA256 "${LIBRARY}" DIGEST)
file(WRITE "${LIBRARY}.sha256.part" "${DIGEST}  ${NAME}\n")
file(RENAME "${LIBRARY}.sha256.part" "${LIBRARY}.sha256")
